"""Generate, score and evaluate sequences for structures; fold sequences.

esmeray design generate runs/structdiff --structure fold.pdb --number 8 --output designs
"""
