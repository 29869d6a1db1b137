"""What a policy would have done to recorded traffic: the access log's arrivals, replayed in virtual time."""
