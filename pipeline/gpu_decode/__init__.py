"""loader.decoder=gpu and hybrid: JPEG files decoded by the GPU, cropped and resized there by one kernel."""
