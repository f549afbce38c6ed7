"""What the tests share, by purpose; tests/README.md lists it."""
