"""Training and inference of protein language models and sequence classifiers, distributed on Ray."""

from pathlib import Path

# In a checkout the rooms are the folders beside this one; in a wheel they lie in it.
_checkout = Path(__file__).parents[1]
if (_checkout / "train_ray.py").is_file():
    __path__.append(str(_checkout))
