"""The families of models whose folders are read and written: a file for each set of tensors."""
