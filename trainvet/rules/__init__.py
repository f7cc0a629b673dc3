"""One file per defect. A new rule is one new file here and its test; nothing lists them."""
