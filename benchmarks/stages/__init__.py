"""The stages: each measures one part of the data or model path, compared with what people use for it today."""
