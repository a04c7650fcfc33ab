"""What moves where: arithmetic on records, without torch."""
