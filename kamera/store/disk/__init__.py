"""The directory tier: objects as files, an index beside them, and the code that keeps both in agreement."""
