"""Generate, score and evaluate sequences for structures; fold sequences.

esmeray design generate runs/structdiff --generate.structures fold.pdb --generate.output designs
"""
