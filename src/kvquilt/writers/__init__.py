"""Offline writers: a segment in, a compiled segment out. One writer is one dataclass in one file."""
