"""A whole cluster in a network of its own: API server, istiod, gateway, and what `kvmesh install` has put into it.

Pods are Kubernetes objects whose addresses are all on this network's loopback; what would run in them is started at
these addresses, with the environment that the objects say and the rights of their service accounts.
`make test-mesh` runs it so.
"""
