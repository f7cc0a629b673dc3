"""Tests. ``series`` is the notation in which the rules' tests write their runs."""
