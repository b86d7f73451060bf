"""Optimal schedules by constraint programming (InferMax section 5), and their replay."""
