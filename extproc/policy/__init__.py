"""What operators declare: values, documents, how several policies merge, and what their status says."""
