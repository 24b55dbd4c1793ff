"""Documents: each gives its texts and takes their translations; everything else in it stays byte for byte."""
