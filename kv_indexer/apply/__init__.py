"""From events to one atomic change of the index, and its writer."""
