"""Search for the settings that train an experiment fastest.

esmeray tune --config train_config/masked_lm.yaml
"""
