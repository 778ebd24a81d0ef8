read -r count
echo "Is it 1?"
read -r answer
