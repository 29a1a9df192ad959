"""Operations with a reference, a plain XLA form and (where it pays) a Pallas kernel."""
