"""What is wrong with a running mesh and how to mend it: facts are gathered, judged, and shown as findings."""
