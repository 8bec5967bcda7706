"""Low precision, emulated: what is stored and multiplied has exactly the values of the format."""
