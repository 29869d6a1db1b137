"""What requests are promised, and whether it was kept: targets of a request, verdicts on answers, figures. Pure."""
