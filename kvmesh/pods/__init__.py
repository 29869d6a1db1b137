"""GETs a pod's pages and reads what they say."""
