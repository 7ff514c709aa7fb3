"""The parts of ``esmeray profile store``: what is measured and how, the stages, and how they are shown."""
