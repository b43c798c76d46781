"""Checks of posenc.keras for one backend; tests/test_keras.py runs them under each."""
