"""Models by name: `build(name, num_classes=..., image_size=...)` returns an nn.Module."""

from models.weights import fit_weights as fit_weights
from models.weights import load_weights as load_weights
from models.weights import read_file as read_file
from models.weights import weights_in as weights_in
from models.zoo import available as available
from models.zoo import build as build
from models.zoo import freeze as freeze
from models.zoo import train_mode as train_mode
from models.zoo import use_channels_last as use_channels_last
