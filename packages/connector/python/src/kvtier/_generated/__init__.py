"""Generated from proto/ by npm run generate."""
