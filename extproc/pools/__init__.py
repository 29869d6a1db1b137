"""One running picker for each pool; pools come, change and go while requests run."""
