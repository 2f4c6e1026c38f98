"""Train a drafter for a frozen target: the target's answers as data, anchors per document, masks as at inference."""
