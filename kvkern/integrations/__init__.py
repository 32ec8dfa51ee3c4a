"""kvkern inside other people's model code; each module needs the library it is named after."""
