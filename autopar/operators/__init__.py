"""Torch's operators: one record each (`records.py`), questions about traits (`traits.py`), and torch's own answers
(`schemas.py`)."""
