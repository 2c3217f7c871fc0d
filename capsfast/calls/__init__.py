"""A call of a public function: its options and arguments, their axes, dtypes and checks."""
