"""Typed request bodies, one API a file. Fields that an API does not know are ignored, as the originals do."""
