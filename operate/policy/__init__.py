"""Commands on InferencePolicies: check and explain."""
