"""Defect detection and localisation learnt from two bins of pictures, good and defective."""
