"""The Kubernetes external-metrics API: signals of `scaling` for HorizontalPodAutoscalers, and who may ask for them."""
