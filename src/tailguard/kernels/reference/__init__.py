"""What each kernel computes, in Python: the definition that tests hold the native core against, and its stand-in."""
