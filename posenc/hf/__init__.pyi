from posenc.hf.attachment.attach import attach as attach
from posenc.hf.attachment.attach import attached as attached
from posenc.hf.attachment.attach import detach as detach
from posenc.hf.attachment.attach import shape_of as shape_of
from posenc.hf.attachment.load import load as load
