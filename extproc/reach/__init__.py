"""Which pools a policy reaches, as Kubernetes documents say: configurations of pools, and the status of policies."""
