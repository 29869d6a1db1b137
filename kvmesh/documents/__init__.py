"""What Kubernetes or a folder says: documents, their sources, pools resolved from them, status written back."""
