"""Checks of posenc.keras for one backend; tests/keras/test_keras.py runs them under each."""
