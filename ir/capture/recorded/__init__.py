"""Record the torch calls of models whose Python dynamo cannot follow."""
