"""The shipped reader of screens: how it was trained, what it reads, and how it is asked."""
