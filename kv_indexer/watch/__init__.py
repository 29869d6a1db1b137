"""What is wrong although nothing has failed: pods are scraped, streams watched, findings reported."""
