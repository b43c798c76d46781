from posenc.encodings.registry.build import create as create
from posenc.encodings.registry.build import encoding_class as encoding_class
from posenc.encodings.registry.entries import Entry as Entry
from posenc.encodings.registry.grammar import parse as parse
from posenc.encodings.registry.lookup import entry as entry
from posenc.encodings.registry.lookup import names as names
from posenc.encodings.registry.lookup import register as register
