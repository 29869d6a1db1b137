"""Policy files of other systems, translated: the fields of an InferencePolicy, and a note on each key."""
