"""The decoder in C++: quantised weights as they are, the whole pass in one parallel region."""
