"""Tables of numbers and classes: the estimators at their defaults next to what people use."""
