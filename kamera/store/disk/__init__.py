"""The directory tier: objects as files, an index beside them, and what keeps the two in agreement."""
