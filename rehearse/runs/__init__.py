"""What a run is: a Trainer's or a plain loop; what it says of itself, and the copies that it is tried on."""
