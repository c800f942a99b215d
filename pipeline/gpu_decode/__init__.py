"""loader.decoder=gpu and hybrid: the GPU decodes JPEG files; one kernel crops and resizes them."""
