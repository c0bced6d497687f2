"""The 272 ids that data and models share: 256 bytes and 16 specials.

Ids 0..255 are the bytes themselves. A document is ``BOS bytes EOS``; PAD fills what is left of a row and is never an
input to a loss, a count or a pooled mean. The marker pairs enclose the raw bytes of another modality.
"""

NUM_BYTES = 256

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
IMAGE_START_ID, IMAGE_END_ID = 259, 260
AUDIO_START_ID, AUDIO_END_ID = 261, 262
VIDEO_START_ID, VIDEO_END_ID = 263, 264
FIM_PREFIX_ID, FIM_MIDDLE_ID, FIM_SUFFIX_ID = 265, 266, 267
RESERVED_IDS = (268, 269, 270, 271)

VOCAB_SIZE = 272
