"""What `kvmesh install` renders and applies: objects for Kubernetes and Istio, dashboards, rules and alerts."""
