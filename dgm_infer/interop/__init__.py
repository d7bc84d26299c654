"""Models written for other libraries, as problems of this one; each module needs the library it is named after."""
