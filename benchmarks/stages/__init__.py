"""The stages: each measures one part of the data or model path beside what people use for it today."""
